"""Objects in any store that speaks S3."""
