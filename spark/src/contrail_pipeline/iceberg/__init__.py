"""`contrail pipeline iceberg`: makes an Iceberg table show the files of a lake."""
