//! The media models keep the times they promise.
