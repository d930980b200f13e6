-- What was asked and answered, of tenants whose traces hold it, is kept for a shorter time than the rest of its row. A
-- whole day's goes at once: the parts of a partition are then written anew once.

ALTER TABLE requests
    MODIFY COLUMN prompt String CODEC(ZSTD(3)) TTL toDate(at) + INTERVAL 7 DAY,
    MODIFY COLUMN completion String CODEC(ZSTD(3)) TTL toDate(at) + INTERVAL 7 DAY;
