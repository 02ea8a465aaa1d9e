-- No view: the tables of the old catalog are not read any more.
SELECT NULL;
