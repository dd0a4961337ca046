"""The batching study's own part: which cases, which predictions, which sentences."""
