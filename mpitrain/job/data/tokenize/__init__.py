"""The commands `tokenizer train`, which makes a tokenizer of documents, and `tokenize`, which makes files of tokens of them."""
