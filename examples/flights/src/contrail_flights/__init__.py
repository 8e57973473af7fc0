"""The demonstration: a year of real flights through one durable stream, checked at every step."""
