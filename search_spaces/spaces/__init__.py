"""Search spaces, as YAML files."""
