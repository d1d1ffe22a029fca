"""Result files: results.json, events.jsonl, timelines."""
