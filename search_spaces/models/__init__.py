"""Model shapes, as YAML files."""
