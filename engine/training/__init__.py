"""Training of drafters: the target answers prompts, its hidden states are kept, a head learns from them."""
