"""Commands that start a planned cluster with vLLM."""
