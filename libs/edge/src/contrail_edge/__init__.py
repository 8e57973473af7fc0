"""The HTTP kit that the api and the gateway share: requests, answers, limits, refusals, serving."""
