"""Token ids to rows of the embedding, of which a step may find some only where they were sampled."""
