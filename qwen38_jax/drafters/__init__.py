"""Drafters: small models that propose the tokens a verify block checks."""
