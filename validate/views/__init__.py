"""What is made of a report: a page for readers, files for pipelines."""
