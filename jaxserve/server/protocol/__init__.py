"""The bodies of requests and answers, as OpenAI's clients send and read them. Data only."""
