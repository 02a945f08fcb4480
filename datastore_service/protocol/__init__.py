"""The value types that cross the datastore's boundary: both halves import them, they import neither."""
