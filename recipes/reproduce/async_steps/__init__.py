"""Whether drafts make the steps of an asynchronous job shorter (Fig 7): whole jobs of the built-in model."""
