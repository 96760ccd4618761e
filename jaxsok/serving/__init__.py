"""Serving: trained tables, frozen, several of them fused into one lookup, from files, behind an HPS configuration."""
