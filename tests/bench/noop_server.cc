// The floor in C++: what `noop_server.py` does, without Python. It says CONTINUE to everything.
//
//     c++ -O2 -std=c++17 noop_server.cc $(pkg-config --cflags --libs grpc++) && ./a.out unix:/tmp/noop.sock
//
// Messages stay bytes. The first of a ProcessingRequest is the tag of what it is about (request_headers is field 2, and
// so on), and the answer to it is the field before that one of ProcessingResponse, empty: two bytes.

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>

namespace {

constexpr unsigned char kOneField = 8;  // what lies between the tags of neighbouring fields

class Exchange : public grpc::ServerGenericBidiReactor {
 public:
  Exchange() { StartRead(&message_); }

  void OnReadDone(bool ok) override {
    grpc::Slice bytes;
    if (!ok || !message_.DumpToSingleSlice(&bytes).ok() || bytes.size() == 0) {
      Finish(grpc::Status::OK);
      return;
    }
    const unsigned char answer[] = {static_cast<unsigned char>(*bytes.begin() - kOneField), 0};
    const grpc::Slice slice(answer, sizeof answer);
    answer_ = grpc::ByteBuffer(&slice, 1);
    StartWrite(&answer_);
  }

  void OnWriteDone(bool ok) override {
    if (ok) {
      StartRead(&message_);
    } else {
      Finish(grpc::Status::OK);
    }
  }

  void OnDone() override { delete this; }

 private:
  grpc::ByteBuffer message_, answer_;
};

class ExternalProcessor : public grpc::CallbackGenericService {
 public:
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override {
    return new Exchange;
  }
};

}  // namespace

int main(int, char** arguments) {
  ExternalProcessor service;
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(64 << 20);
  builder.AddListeningPort(arguments[1], grpc::InsecureServerCredentials());
  builder.RegisterCallbackGenericService(&service);
  builder.BuildAndStart()->Wait();
}
