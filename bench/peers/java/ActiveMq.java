import jakarta.jms.BytesMessage;
import jakarta.jms.DeliveryMode;
import jakarta.jms.MessageConsumer;
import jakarta.jms.MessageProducer;
import jakarta.jms.Queue;
import jakarta.jms.Session;
import java.io.File;
import java.util.Random;
import org.apache.activemq.ActiveMQConnection;
import org.apache.activemq.ActiveMQConnectionFactory;
import org.apache.activemq.broker.BrokerService;
import org.apache.activemq.command.ActiveMQQueue;
import org.apache.activemq.store.kahadb.KahaDBPersistenceAdapter;

/**
 * An ActiveMQ broker over KahaDB, messages to a queue of it, and from it. The clients print how many seconds they took. WARMUP
 * messages go through another queue before, so that Java has compiled what is measured.
 *
 * <pre>serve PORT FOLDER SYNC                     SYNC: ALWAYS, PERIODIC or NEVER, when the journal is synced
 * produce PORT QUEUE COUNT BYTES HOW WARMUP   persistent messages; HOW: each, after one is stored the next; async; or a
 *                                           number: transactions of so many
 * consume PORT QUEUE COUNT BYTES HOW WARMUP   from the first on; HOW: each, an ack for each; or some: acks for many
 * delete PORT QUEUE</pre>
 */
public class ActiveMq {
    public static void main(String[] given) throws Exception {
        String url = "tcp://127.0.0.1:" + given[1];
        if (given[0].equals("serve")) {
            serve(url, new File(given[2]), given[3]);
            return;
        }
        ActiveMQConnectionFactory factory = new ActiveMQConnectionFactory(url);
        factory.setWatchTopicAdvisories(false);
        ActiveMQConnection connection = (ActiveMQConnection) factory.createConnection();
        connection.start();
        try {
            if (given[0].equals("delete")) {
                connection.destroyDestination(new ActiveMQQueue(given[2]));
                return;
            }
            int count = Integer.parseInt(given[3]);
            int bytes = Integer.parseInt(given[4]);
            int warmup = Integer.parseInt(given[6]);
            boolean isProduced = given[0].equals("produce");
            if (warmup > 0) {
                String queue = given[2] + "-warmup";
                produce(connection, queue, warmup, bytes, isProduced ? given[5] : "async");
                if (!isProduced) {
                    consume(connection, queue, warmup, given[5].equals("some"));
                }
                connection.destroyDestination(new ActiveMQQueue(queue));
            }
            double seconds = isProduced
                    ? produce(connection, given[2], count, bytes, given[5])
                    : consume(connection, given[2], count, given[5].equals("some"));
            System.out.println(seconds);
        } finally {
            connection.close();
        }
    }

    static void serve(String url, File folder, String sync) throws Exception {
        BrokerService broker = new BrokerService();
        broker.setBrokerName("bench");
        broker.setUseJmx(false);
        broker.setUseShutdownHook(true);
        broker.setDataDirectoryFile(folder);
        KahaDBPersistenceAdapter store = new KahaDBPersistenceAdapter();
        store.setDirectory(new File(folder, "kahadb"));
        store.setJournalDiskSyncStrategy(sync);
        if (sync.equals("NEVER")) {
            store.setPreallocationScope("none"); // it makes syncs faster; and the files' sizes then say what is in them
        }
        broker.setPersistenceAdapter(store);
        broker.getSystemUsage().getMemoryUsage().setPercentOfJvmHeap(70); // as in the conf it comes with
        broker.addConnector(url);
        broker.start();
        broker.waitUntilStopped();
    }

    static double produce(ActiveMQConnection connection, String name, int count, int bytes, String how) throws Exception {
        byte[] value = new byte[bytes];
        new Random(1).nextBytes(value);
        int batch = how.matches("[0-9]+") ? Integer.parseInt(how) : 0;
        connection.setUseAsyncSend(how.equals("async"));
        Session session = connection.createSession(batch > 0, Session.AUTO_ACKNOWLEDGE);
        Queue queue = session.createQueue(name);
        MessageProducer producer = session.createProducer(queue);
        producer.setDeliveryMode(DeliveryMode.PERSISTENT);
        long begun = System.nanoTime();
        for (int sent = 1; sent <= count; sent++) {
            BytesMessage message = session.createBytesMessage();
            message.writeBytes(value);
            if (sent == count) {
                connection.setUseAsyncSend(false); // a connection's messages are stored one after the other
            }
            producer.send(message);
            if (batch > 0 && (sent % batch == 0 || sent == count)) {
                session.commit();
            }
        }
        double seconds = (System.nanoTime() - begun) / 1e9;
        session.close();
        return seconds;
    }

    static double consume(ActiveMQConnection connection, String name, int count, boolean some) throws Exception {
        Session session = connection.createSession(false, some ? Session.DUPS_OK_ACKNOWLEDGE : Session.AUTO_ACKNOWLEDGE);
        MessageConsumer consumer = session.createConsumer(session.createQueue(name));
        consumer.receive();
        long begun = System.nanoTime();
        for (int seen = 1; seen < count; seen++) {
            consumer.receive();
        }
        double seconds = (System.nanoTime() - begun) / 1e9;
        session.close();
        return seconds;
    }
}
