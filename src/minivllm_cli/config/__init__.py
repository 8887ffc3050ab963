"""Settings: schema, YAML, layers, flags."""
