"""`headport tune`: threads and spinning chosen by a short measurement."""
