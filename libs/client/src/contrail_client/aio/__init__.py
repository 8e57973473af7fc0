"""The asynchronous client. `contrail_client.blocking` is generated from this package."""
