"""Sends new weights to engines and audits that they arrived."""
