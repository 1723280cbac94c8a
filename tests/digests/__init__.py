"""A net under changes that shall change nothing: what is decoded, trained and said, held against stored digests."""
