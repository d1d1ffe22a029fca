"""Models by their Hugging Face files: config.json, and hf_quant_config.json next to it."""
