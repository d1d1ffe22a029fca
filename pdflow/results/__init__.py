"""What a run says: records, percentiles, the report, vllm bench's JSON, the log of events."""
