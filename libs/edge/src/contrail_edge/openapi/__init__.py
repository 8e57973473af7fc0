"""The OpenAPI document and the routes that are declared to FastAPI."""
