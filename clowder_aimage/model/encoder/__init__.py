"""Encoders of texts: BERT, RoBERTa, MPNet and their kin, whose states become embeddings."""
