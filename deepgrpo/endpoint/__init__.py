"""Client of OpenAI-compatible endpoints, with budget, circuit breaker and cache."""
