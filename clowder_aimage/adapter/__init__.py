"""Adapters of image models: LoRA and its relatives, read in all dialects, independent of MLX."""
