"""Requests whose answer is one JSON document of a pooling model: embeddings, rerank, classification and scores."""
