"""Sends new weights from every rank to engines, and audits on rank 0 that they arrived."""
