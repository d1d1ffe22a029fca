"""The results of a run: records, percentiles, the report, vllm bench's JSON, the log of events."""
