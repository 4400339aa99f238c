"""The files of a run: lines of figures (metrics.jsonl, ranks.jsonl) and of events (events.jsonl)."""
