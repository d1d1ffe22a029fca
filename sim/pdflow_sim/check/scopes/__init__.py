"""Scopes: which worlds are explored, and what each must reach to count."""
