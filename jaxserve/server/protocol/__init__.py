"""The bodies of requests and answers in OpenAI's format. Data only."""
