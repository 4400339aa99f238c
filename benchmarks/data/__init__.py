"""The reading of documents: beside other libraries, and beside a training step."""
