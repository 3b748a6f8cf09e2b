"""Tensors that are stored as codes: quantized files of ComfyUI and GGUF, and their arithmetic."""
