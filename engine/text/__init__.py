"""Text in and out: tokenizer, chat templates, incremental detokenization."""
