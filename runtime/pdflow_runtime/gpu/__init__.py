"""GPUs: CUDA's driver, memory that torch sees as tensors, and copies of many pieces at once."""
