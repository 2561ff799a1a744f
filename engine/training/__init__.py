"""Training of drafters: the target answers prompts, its hidden states are kept, a head learns from them.

`run.train_drafter` is all of it; `python -m engine train` calls that.
"""
