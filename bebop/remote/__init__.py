"""Parts of a job in processes of their own, behind Ray."""
