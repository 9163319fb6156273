// YCSB on RocksDB: its load, and its core workloads A and F: half reads, half updates (A) or read-modify-writes (F) of
// records of 1 KiB, chosen by a scrambled Zipf distribution. Options of RocksDB are its defaults, without compression.
//
// ycsb DIR RECORDS OPERATIONS load|a|f   prints one JSON object with the times of the operations, in nanoseconds.

#include <rocksdb/db.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr size_t RECORD_BYTES = 1024;  // 10 fields of 100 bytes, and their names
constexpr double THETA = 0.99;

void expect(const rocksdb::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "ycsb: %s\n", status.ToString().c_str());
  std::exit(1);
}

uint64_t fnv(uint64_t value) {
  uint64_t hash = 0xCBF29CE484222325;
  for (int byte = 0; byte < 8; byte++, value >>= 8) hash = (hash ^ (value & 0xFF)) * 0x100000001B3;
  return hash;
}

// Gray et al., "Quickly generating billion-record synthetic databases", as YCSB does it.
class ScrambledZipf {
 public:
  explicit ScrambledZipf(uint64_t items) : items_(items) {
    for (uint64_t rank = 1; rank <= items; rank++) zeta_ += 1 / std::pow(double(rank), THETA);
    double zeta2 = 1 + std::pow(0.5, THETA);
    eta_ = (1 - std::pow(2.0 / double(items), 1 - THETA)) / (1 - zeta2 / zeta_);
  }

  uint64_t next(std::mt19937_64& random) const { return fnv(rank(random)) % items_; }

 private:
  uint64_t rank(std::mt19937_64& random) const {
    double u = std::uniform_real_distribution<>(0, 1)(random), uz = u * zeta_;
    if (uz < 1) return 0;
    if (uz < 1 + std::pow(0.5, THETA)) return 1;
    return uint64_t(double(items_) * std::pow(eta_ * u - eta_ + 1, 1 / (1 - THETA)));
  }

  uint64_t items_;
  double zeta_ = 0, eta_ = 0;
};

std::string key_of(uint64_t record) { return "user" + std::to_string(fnv(record)); }

std::string record_of(std::mt19937_64& random) {
  std::string record(RECORD_BYTES, 0);
  for (char& byte : record) byte = char(random());
  return record;
}

std::unique_ptr<rocksdb::DB> open(const char* dir) {
  rocksdb::Options options;
  options.create_if_missing = true;
  options.compression = rocksdb::kNoCompression;
  rocksdb::DB* db = nullptr;
  expect(rocksdb::DB::Open(options, dir, &db));
  return std::unique_ptr<rocksdb::DB>(db);
}

void print(std::vector<uint64_t>& times_ns, double elapsed_s) {
  std::sort(times_ns.begin(), times_ns.end());
  double sum = 0;
  for (uint64_t ns : times_ns) sum += double(ns);
  auto at = [&](double share) { return times_ns[size_t(share * double(times_ns.size() - 1))]; };
  std::printf("{\"ops\": %zu, \"ops_per_s\": %f, \"mean_ns\": %f, \"p50_ns\": %lu, \"p99_ns\": %lu, \"p999_ns\": %lu, "
              "\"p9999_ns\": %lu, \"max_ns\": %lu}\n",
              times_ns.size(), double(times_ns.size()) / elapsed_s, sum / double(times_ns.size()), at(0.5), at(0.99),
              at(0.999), at(0.9999), times_ns.back());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5 || std::strtoull(argv[2], nullptr, 10) < 2 || std::strtoull(argv[3], nullptr, 10) < 1) {
    std::fprintf(stderr, "usage: ycsb DIR RECORDS OPERATIONS load|a|f\n");
    return 2;
  }
  uint64_t records = std::strtoull(argv[2], nullptr, 10), operations = std::strtoull(argv[3], nullptr, 10);
  bool load = argv[4][0] == 'l', modify = argv[4][0] == 'f';
  std::mt19937_64 random(1);
  auto db = open(argv[1]);
  std::vector<uint64_t> times_ns;
  times_ns.reserve(std::max(records, operations));
  auto begun = std::chrono::steady_clock::now(), before = begun;
  auto note = [&] {
    auto now = std::chrono::steady_clock::now();
    times_ns.push_back(uint64_t(std::chrono::nanoseconds(now - before).count()));
    before = now;
  };
  for (uint64_t record = 0; record < records; record++) {
    expect(db->Put({}, key_of(record), record_of(random)));
    note();
  }
  if (!load) {
    ScrambledZipf chosen(records);
    std::string read, written = record_of(random);
    times_ns.clear();
    begun = before = std::chrono::steady_clock::now();
    for (uint64_t operation = 0; operation < operations; operation++) {
      std::string key = key_of(chosen.next(random));
      bool update = random() % 2 == 0;
      if (!update || modify) expect(db->Get({}, key, &read));
      if (update) {
        written[operation % RECORD_BYTES]++;
        expect(db->Put({}, key, written));
      }
      note();
    }
  }
  print(times_ns, std::chrono::duration<double>(before - begun).count());
}
