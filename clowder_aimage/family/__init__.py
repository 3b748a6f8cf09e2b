"""Families of image models: the names and shapes of their tensors in all layouts, their configs."""
