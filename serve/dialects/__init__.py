"""Two more dialects of an answer to a conversation: OpenAI's Responses and Anthropic's Messages.

Their bodies become those of chat completions, and their answers are written from the same outputs.
"""
