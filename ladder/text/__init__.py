"""Text to batches: corpora, sources, mixture, tokenizer, which window is seen when."""
