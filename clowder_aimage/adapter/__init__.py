"""Adapters of image models: LoRA, LoHa, LoKr and DoRA, read in all dialects, without MLX."""
