"""An entry on its way from requests through the log to results and the store."""
