"""The value types that cross the datastore's boundary. Plugin and datastore import them; they import neither."""
