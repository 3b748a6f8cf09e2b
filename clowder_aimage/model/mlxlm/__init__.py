"""Language models of Transformers AImages, computed by the networks of mlx-lm."""
