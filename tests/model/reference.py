"""The whole model and its objective again, in NumPy float64 and plain loops. Shares no code with the package.

Gradients come from central differences of `objective`. Everything is computed dropless; `parts` says into how many
equal runs of sequences a batch is dealt (replicas × ranks), which only per-rank figures can tell.
"""

from typing import NamedTuple

import numpy as np


class Layer(NamedTuple):
    """What one layer's router did: [batch, seq, …] arrays, and figures of the whole batch."""

    logits: np.ndarray
    experts: np.ndarray
    gates: np.ndarray
    load: np.ndarray
    router_z: float
    balance_loss: float
    next_bias: np.ndarray


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def log_sum_exp(row):
    peak = max(row)
    return peak + np.log(sum(np.exp(value - peak) for value in row))


def softmax(row):
    return np.exp(row - log_sum_exp(row))


def norm(x, config, gain=None):
    """One vector."""
    scaled = x / np.sqrt(sum(value * value for value in x) / len(x) + config.norm_epsilon)
    return scaled if gain is None else scaled * gain


def gated_norm(p, name, x, config):
    """One sequence: the norm called `name` and its low-rank gate, if it has one."""
    rows = []
    for token in x:
        y = norm(token, config, p[name])
        if config.gated_norm_rank:
            gate = p[f"{name}_gate"]
            y = y * sigmoid(silu(y @ gate["down"]) @ gate["up"])
        rows.append(y)
    return np.stack(rows)


def short_conv(p, site, z, config):
    """out[t] = Σ_lag w[lag] ⊙ z[t − lag] on [seq, channels]; `z` itself where the site is not convolved."""
    if site not in config.short_conv_sites:
        return z
    out = np.zeros_like(z)
    for t in range(len(z)):
        for lag in range(min(config.short_conv_kernel, t + 1)):
            out[t] += p[site][lag] * z[t - lag]
    return out


def rotate_head(vector, position, config):
    """Pair (i, i + half) of the first rotary dimensions turned by position · θ^(−2i/rotary_dim), a float32 angle."""
    rotary_dim = round(config.rotary_fraction * config.head_dim)
    out, half = vector.copy(), rotary_dim // 2
    for pair in range(half):
        angle = float(np.float32(position * config.rotary_theta ** (-2 * pair / rotary_dim)))
        a, b = vector[pair], vector[pair + half]
        out[pair] = a * np.cos(angle) - b * np.sin(angle)
        out[pair + half] = a * np.sin(angle) + b * np.cos(angle)
    return out


def is_global(layer, config):
    return (layer + 1) % config.global_every == 0 or layer == config.num_layers - 1


def stored_head(head, whole, config):
    """Key/value head that query head `head` reads."""
    kv = head * config.num_kv_heads // config.num_heads
    if whole and config.global_kv_heads is not None:
        kv = kv * config.global_kv_heads // config.num_kv_heads
    return kv


def heads_of(p, conv, name, count, x, config):
    """A projection of one sequence as [heads, seq, dim]; keys and values convolved where asked for."""
    flat = x @ p[name].reshape(config.hidden_dim, -1)
    if name != "query":
        flat = short_conv(conv, name, flat, config)
    return [flat[:, head * config.head_dim : (head + 1) * config.head_dim] for head in range(count)]


def attention(p, conv, x, config, *, whole):
    """One sequence [seq, hidden], without its residual."""
    queries = heads_of(p, conv, "query", config.num_heads, x, config)
    keys = heads_of(p, conv, "key", config.num_kv_heads, x, config)
    values = heads_of(p, conv, "value", config.num_kv_heads, x, config)
    gains = (p["query_norm"], p["key_norm"]) if config.learned_query_key_norm else (None, None)

    def prepared(head, gain):
        rows = [norm(row, config, gain) for row in head]
        return rows if whole else [rotate_head(row, position, config) for position, row in enumerate(rows)]

    out = np.zeros_like(x)
    for head in range(config.num_heads):
        kv = stored_head(head, whole, config)
        q, k, v = prepared(queries[head], gains[0]), prepared(keys[kv], gains[1]), values[kv]
        for i in range(len(x)):
            seen = [j for j in range(i + 1) if whole or i - j < config.window]
            scores = np.array([q[i] @ k[j] for j in seen]) * config.query_key_multiplier / np.sqrt(config.head_dim)
            y = sum(weight * v[j] for weight, j in zip(softmax(scores), seen, strict=True))
            if config.exclusive_attention:
                y = y - (y @ v[i]) / (v[i] @ v[i] + 1e-6) * v[i]
            if config.attention_gate:
                y = y * 2.0 * sigmoid(x[i] @ p["gate"][:, head])
            out[i] += y @ p["out"][head]
    return short_conv(conv, "attention", out, config)


def swiglu(x, weights):
    gate, up = x @ weights["gate_up"][:, 0, :], x @ weights["gate_up"][:, 1, :]
    return (silu(gate) * up) @ weights["down"]


def choose(logits, bias, flat_index, config):
    """Expert ids of one token, best first, ties to the lower id."""
    if config.routing == "uniform":
        return [(flat_index * config.top_k + k) % config.num_experts for k in range(config.top_k)]
    biased = logits + bias
    return sorted(range(config.num_experts), key=lambda e: (-biased[e], e))[: config.top_k]


def gates_of(logits, chosen, config):
    picked = logits[chosen]
    if config.gate == "softmax":
        return config.gate_sum * softmax(logits)[chosen]
    if config.gate == "topk_softmax":
        return config.gate_sum * softmax(picked)
    return config.gate_sum * sigmoid(picked) / sum(sigmoid(picked))


def routed_experts(p, token, chosen, gates, config):
    entering = norm(token @ p["latent_down"], config, p["latent_norm"]) if config.latent_dim else token
    total = np.zeros(len(entering))
    for gate, e in zip(gates, chosen, strict=True):
        expert = {"gate_up": p["experts"]["gate_up"][e], "down": p["experts"]["down"][e]}
        total += gate * swiglu(entering, expert)
    return total @ p["latent_up"] if config.latent_dim else total


def moe(p, conv, bias, x, config, *, parts=1, routes=None):
    """The whole batch [batch, seq, hidden] → its branch and what the router did; `routes` replaces its choice."""
    batch, seq, _ = x.shape
    logits = np.stack([[token @ p["router"] for token in sequence] for sequence in x])
    experts = np.zeros((batch, seq, config.top_k), int)
    gates = np.zeros((batch, seq, config.top_k))
    out = np.zeros_like(x)
    for b in range(batch):
        for t in range(seq):
            experts[b, t] = choose(logits[b, t], bias, b * seq + t, config) if routes is None else routes[b, t]
            gates[b, t] = gates_of(logits[b, t], experts[b, t], config)
            out[b, t] = routed_experts(p, x[b, t], experts[b, t], gates[b, t], config)
            if config.num_shared_experts:
                out[b, t] += swiglu(x[b, t], p["shared"])
        out[b] = short_conv(conv, "moe", out[b], config)
    load = load_of(experts, config)
    router_z = np.mean([log_sum_exp(row) ** 2 for row in logits.reshape(-1, config.num_experts)])
    aux = balance_loss(logits, experts, config, parts=parts) if config.balance == "auxiliary_loss" else 0.0
    after = next_bias(logits, bias, load, config, parts=parts)
    return out, Layer(logits, experts, gates, load, float(router_z), aux, after)


def load_of(experts, config):
    load = np.zeros(config.num_experts, int)
    for e in experts.ravel():
        load[e] += 1
    return load


def balance_loss(logits, experts, config, *, parts):
    """E · Σ_e f_e P_e, over the tokens of each scope, averaged over scopes."""
    groups = {"global": 1, "local": parts, "sequence": len(logits)}[config.balance_scope]
    losses = []
    for own_logits, own_experts in zip(np.split(logits, groups), np.split(experts, groups), strict=True):
        frequency = load_of(own_experts, config) / own_experts.size
        probability = np.mean([softmax(row) for row in own_logits.reshape(-1, config.num_experts)], axis=0)
        losses.append(config.num_experts * sum(frequency * probability))
    return float(np.mean(losses))


def next_bias(logits, bias, load, config, *, parts):
    """Bias the next step selects with."""
    if config.balance == "loss_free_bias":
        return np.array([b + config.balance_step * np.sign(np.mean(load) - n) for b, n in zip(bias, load, strict=True)])
    if config.balance != "quantile":
        return np.array(bias, float)
    rows = logits.reshape(-1, config.num_experts)
    margins = np.stack([row - sorted(row + bias, reverse=True)[config.top_k] for row in rows])
    level = {"exact": exact_level, "topk": topk_level, "histogram": histogram_level}[config.quantile_estimator]
    levels = level(margins, config, parts)
    return np.mean(levels) - levels


def exact_level(margins, config, parts):
    """The smallest level that at most T · K // E margins exceed: the next largest one."""
    count = len(margins) * config.top_k // config.num_experts
    return np.array([sorted(column, reverse=True)[count] for column in margins.T])


def topk_level(margins, config, parts):
    """Per rank the max(1, T · K // E)-th largest, averaged over ranks."""
    levels = []
    for own in np.split(margins, parts):
        count = max(1, len(own) * config.top_k // config.num_experts)
        levels.append([sorted(column, reverse=True)[count - 1] for column in own.T])
    return np.mean(levels, axis=0)


def histogram_level(margins, config, parts, bins=10_000):
    """10,000 equal bins over the whole range; straight line inside the bin where the count from above crosses."""
    low, high = margins.min(), margins.max()
    width = (high - low) / bins
    wanted = len(margins) * config.top_k / config.num_experts
    levels = []
    for column in margins.T:
        counts = np.zeros(bins)
        for value in column:
            counts[min(int((value - low) / width), bins - 1)] += 1
        above, index = 0.0, bins - 1
        while above + counts[index] < wanted:
            above += counts[index]
            index -= 1
        levels.append(low + width * (index + 1 - (wanted - above) / counts[index]))
    return np.array(levels)


def forward(params, bias, tokens, config, *, parts=1, routes=None):
    """Logits [batch, seq, vocab] and the record of every layer; `routes` holds the experts of each layer."""
    x = params["embed"][tokens]
    if config.embed_norm:
        x = np.stack([gated_norm(params, "embed_norm", sequence, config) for sequence in x])
    records = []
    for layer in range(config.num_layers):
        p = _layer(params["layers"], layer)
        conv, whole = p.get("conv", {}), is_global(layer, config)
        branch = [
            attention(p["attention"], conv, gated_norm(p, "attention_norm", s, config), config, whole=whole) for s in x
        ]
        x = x + np.stack(branch)
        normed = np.stack([gated_norm(p, "moe_norm", sequence, config) for sequence in x])
        fixed = None if routes is None else routes[layer]
        branch, record = moe(p["moe"], conv, bias[layer], normed, config, parts=parts, routes=fixed)
        x = x + branch
        records.append(record)
    head = params["embed"].T if config.tied_head else params["head"]
    return np.stack([gated_norm(params, "final_norm", sequence, config) @ head for sequence in x]), records


def objective(params, bias, tokens, config, *, parts=1, weights=None, routes=None):
    """What is minimised, and the language-model loss alone: tokens [batch, seq + 1], nats."""
    logits, records = forward(params, bias, tokens[:, :-1], config, parts=parts, routes=routes)
    weights = np.ones(tokens[:, 1:].shape) if weights is None else weights
    loss = z_loss = count = 0.0
    for row, target, weight in zip(
        logits.reshape(-1, config.vocab_size), tokens[:, 1:].ravel(), weights.ravel(), strict=True
    ):
        log_z = log_sum_exp(row)
        loss += weight * (log_z - row[target])
        z_loss += weight * log_z**2
        count += weight
    total = (loss + config.logit_z_loss_weight * z_loss) / count
    total += config.router_z_loss_weight * sum(record.router_z for record in records)
    total += config.balance_loss_weight * sum(record.balance_loss for record in records)
    return total, loss / count


def slope(params, direction, step, *args, **options):
    """Central difference of `objective` along a direction, a tree like the parameters.

    Give it `routes`: where a token's choice is close, a small step changes it, and the objective jumps.
    """

    def moved(sign):
        return _add(params, direction, sign * step)

    return (objective(moved(1), *args, **options)[0] - objective(moved(-1), *args, **options)[0]) / (2 * step)


def _add(tree, direction, scale):
    return {
        key: _add(node, direction[key], scale) if isinstance(node, dict) else node + scale * direction[key]
        for key, node in tree.items()
    }


def _layer(tree, layer):
    return {key: _layer(node, layer) if isinstance(node, dict) else node[layer] for key, node in tree.items()}
