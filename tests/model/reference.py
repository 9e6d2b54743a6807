"""The whole forward pass again, in NumPy float64 and plain loops. Shares no code with the package."""

import numpy as np


def norm(x, scale, epsilon):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * scale


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def swiglu(x, gate_up, down):
    gate, up = x @ gate_up[:, 0, :], x @ gate_up[:, 1, :]
    return (gate * sigmoid(gate) * up) @ down


def rotate_head(vector, position, rotary_dim, theta):
    out = vector.copy()
    half = rotary_dim // 2
    for pair in range(half):
        angle = position * theta ** (-2 * pair / rotary_dim)
        a, b = vector[pair], vector[pair + half]
        out[pair] = a * np.cos(angle) - b * np.sin(angle)
        out[pair + half] = a * np.sin(angle) + b * np.cos(angle)
    return out


def attention(p, x, config, *, layer):
    """One sequence [seq, hidden]."""
    last = layer == config.num_layers - 1
    whole = (layer + 1) % config.global_every == 0 or last
    rotary_dim = int(config.rotary_fraction * config.head_dim)
    out = np.zeros_like(x)
    for head in range(config.num_heads):
        kv = head // (config.num_heads // config.num_kv_heads)
        q = norm(x @ p["query"][:, head], p["query_norm"], config.norm_epsilon)
        k = norm(x @ p["key"][:, kv], p["key_norm"], config.norm_epsilon)
        v = x @ p["value"][:, kv]
        if not whole:
            q = np.stack([rotate_head(row, i, rotary_dim, config.rotary_theta) for i, row in enumerate(q)])
            k = np.stack([rotate_head(row, i, rotary_dim, config.rotary_theta) for i, row in enumerate(k)])
        for i in range(len(x)):
            seen = [j for j in range(i + 1) if whole or i - j < config.window]
            scores = np.array([q[i] @ k[j] for j in seen]) * config.query_key_multiplier / np.sqrt(config.head_dim)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            out[i] += sum(w * v[j] for w, j in zip(weights, seen, strict=True)) @ p["out"][head]
    return out


def moe(p, bias, x, config):
    """One sequence [seq, hidden], every assignment computed."""
    out = np.zeros_like(x)
    for i, token in enumerate(x):
        logits = token @ p["router"]
        chosen = sorted(range(config.num_experts), key=lambda e: (-(logits[e] + bias[e]), e))[: config.top_k]
        gates = sigmoid(logits[chosen])
        gates = config.gate_sum * gates / gates.sum()
        latent = norm(token @ p["latent_down"], p["latent_norm"], config.norm_epsilon)
        routed = sum(
            gate * swiglu(latent, p["experts"]["gate_up"][e], p["experts"]["down"][e])
            for gate, e in zip(gates, chosen, strict=True)
        )
        out[i] = routed @ p["latent_up"] + swiglu(token, p["shared"]["gate_up"], p["shared"]["down"])
    return out


def forward(params, bias, tokens, config):
    """Logits [batch, seq, vocab]."""
    logits = []
    for sequence in tokens:
        x = params["embed"][sequence]
        for layer in range(config.num_layers):
            p = _layer(params["layers"], layer)
            x = x + attention(p["attention"], norm(x, p["attention_norm"], config.norm_epsilon), config, layer=layer)
            x = x + moe(p["moe"], bias[layer], norm(x, p["moe_norm"], config.norm_epsilon), config)
        logits.append(norm(x, params["final_norm"], config.norm_epsilon) @ params["head"])
    return np.stack(logits)


def _layer(tree, layer):
    return {key: _layer(node, layer) if isinstance(node, dict) else node[layer] for key, node in tree.items()}
