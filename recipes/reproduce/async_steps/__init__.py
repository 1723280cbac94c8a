"""Study of asynchronous jobs: whether drafts make their steps shorter (Fig 7), in whole jobs of the built-in model."""
